"""Move KV cache from prefill GPUs to decode GPUs."""
