"""What each file of results shows, how it is made, and its table: the text of docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import frozen

from benchmarks import cpu_tables, fleet_tables, gpu_tables, mapped_tables
from benchmarks.engine_tables import sglang, vllm, wrong
from benchmarks.engines_gpu import beside, serving, sglang_tables, tables, trace, turns
from benchmarks.engines_gpu.tables import all_modes, ratios
from benchmarks.tables import Found


@frozen
class Entry:
    """A file of ``benchmarks/results``.

    Args:
        title: of its section.
        tables: makes its tables.
        says: what they show, in a sentence or two.
        command: what makes the file, where the file does not have it.
        picture: in docs/images, and its text for those who cannot see it.
    """

    title: str
    tables: Callable[[Found], str]
    says: str
    command: str = ""
    picture: tuple[str, str] | None = None


TRACE_PICTURE = "A bar for each part of a request's time: vLLM's, the model's, the library's, and the wire's"

TRANSFER = "python -m bench transfer --transport {} --strategies {} --json"

CATALOGUE: Mapping[str, Mapping[str, Entry]] = {
    "In engines": {
        "h200_engines.json": Entry(
            "vLLM on two H200s",
            all_modes,
            "Medians of each connector and order; a cell has a prompt length or a load after another. "
            "`python -m benchmarks.engines_gpu table FILE` prints quantiles, loads, and ratios with their intervals.",
            "OUT=results COMMIT=$(git rev-parse HEAD) benchmarks/engines_gpu/go.sh 1to1:16 1to1:64 1to1:128 2to1:16 "
            "2to1:64 1to2:16 1to2:64; "
            "python -m benchmarks.engines_gpu merge results/engines_*.json; "
            "python -m benchmarks.engines_gpu plot benchmarks/results/h200_engines.json docs/images/bench-engines.svg",
            ("bench-engines.svg", "Median gaps of each connector and order, for each prompt length and block size"),
        ),
        "h200_engines_flags.json": Entry(
            "vLLM with flags",
            ratios,
            "`ours` is the commit before flags, and `other` the one with them.",
            "OUT=results OPTIONS='--other SRC --pairs ours,other' benchmarks/engines_gpu/go.sh 1to1:64",
        ),
        "h200_serve.json": Entry(
            "vLLM over HTTP",
            gpu_tables.serve,
            "Two instances behind the router, which asks both at once, beside the decode instance alone; in float32, "
            "so that rounding changes no token.",
            "examples/vllm/serve.sh MODEL --dtype float32 ...; "
            "python examples/vllm/compare.py MODEL --lengths 100,1000,4000,8000,16000",
        ),
        "vllm_cpu.json": Entry(
            "vLLM on two cores",
            vllm,
            "*No transfer* is the first token after a prompt of one token, and *load* the part in which rows cross. "
            "*Prefill busy* is measured while prefill computes another prompt. "
            "`NixlConnector` runs without NIXL's progress thread, which never sleeps.",
            "python -m benchmarks.vllm_latency",
        ),
        "vllm_cpu_wrong.json": Entry(
            "Wrong references in vLLM",
            wrong,
            "What decode answers to `kv_transfer_params` that are not the request's own, and where the two caches "
            "differ. A prefill instance that starts anew has the `engine_id` of the one before, which vLLM draws by "
            "default. The file has each error's text.",
            "python -m benchmarks.vllm_wrong",
        ),
        "h200_vllm_wrong.json": Entry(
            "Wrong references in vLLM on a GPU",
            wrong,
            "The cases whose caches are alike, on one H200.",
            "DISAGG_KV_ON_GPUS=1 python -m benchmarks.vllm_wrong --groups references",
        ),
        "h200_turns.json": Entry(
            "Turns of a conversation in vLLM",
            turns.shown,
            "Time to decode's first token, both instances asked at once. Prefill has no prefix cache; or two instances "
            "with one take turns; or these load from decode the rows that they lack (*both ways*); or one instance "
            "with a prefix cache has all turns. All instances share one H200. The first prompt has 12,000 tokens, each "
            "further one an answer of 64 and 1,000 new ones more.",
            "OUT=results COMMIT=$(git rev-parse HEAD) OPTIONS='--reps 4' benchmarks/engines_gpu/go.sh turns:64",
        ),
        "h200_trace.json": Entry(
            "Where the time of a request goes in vLLM",
            trace.shown,
            "From the router to decode's first token: requests that are alone, in both orders of a router. A part ends "
            "at its moment, or is empty if that came before the part began, so the parts add up; what an instance does "
            "while it waits for the other one is in none. A load lasts from when the rows are final, and decode is "
            "ready, until decode's first step begins.",
            "OUT=results COMMIT=$(git rev-parse HEAD) benchmarks/engines_gpu/go.sh trace:64; "
            "python -m benchmarks.engines_gpu.trace --plot benchmarks/results/h200_trace.json "
            "--out docs/images/bench-trace.svg",
            ("bench-trace.svg", TRACE_PICTURE),
        ),
        "h200_beside.json": Entry(
            "Tokens of vLLM's decode beside loads, on two H200s",
            beside.shown,
            "Decode computes 6 requests, alone and while it loads 10 prompts of 4,096 tokens a second.",
            "OUT=results COMMIT=$(git rev-parse HEAD) OPTIONS='--reps 6' benchmarks/engines_gpu/go.sh beside:64",
        ),
        "h200_engines_33.json": Entry(
            "vLLM 0.33 on two H200s",
            tables.of_run,
            "Its wheel and its kernels, by `pack_vllm --vllm 0.33.0`.",
            "OUT=results COMMIT=$(git rev-parse HEAD) LIMIT_S=105 OPTIONS='--pairs ours,nixl --reps 4 --rounds 1' "
            "benchmarks/engines_gpu/go.sh 1to1:64",
        ),
        "h200_sglang_layers.json": Entry(
            "Layers that SGLang sends while others are computed",
            sglang_tables.layers,
            "*Wire* is an emulated one of 25 GB/s within the host; the others use NVLink. *Layered* pairs have the "
            "strategy `auto+layer_pipelined`. One round of each load.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) LIMIT_S=185 OPTIONS='--lengths 1024,4096,16384 "
            "--pairs ours,layered,wire,wire-layered,alone --reps 8 --rounds 1' benchmarks/engines_gpu/go.sh 1to1:64",
        ),
        "h200_sglang_layers_one.json": Entry(
            "The same with both servers on one H200",
            sglang_tables.layers,
            "Prefill has its radix cache. Copies, and the model, share one GPU.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) LIMIT_S=200 OPTIONS='--lengths 4096 --pairs "
            'ours,layered,wire,wire-layered,alone --reps 6 --rounds 4 --args {"disable_radix_cache":false}\' '
            "benchmarks/engines_gpu/go.sh 1to1:64",
        ),
        "h200_sglang_http.json": Entry(
            "SGLang over HTTP, both servers on one H200",
            serving.shown,
            "SGLang's benchmark client, and our router before a prefill and a decode server of each backend. Prompts "
            "have 4,096 tokens, answers 32, and each further turn 256 more; in conversations all servers have a radix "
            "cache, but for decode of *whole*. All texts of requests that were alone are those of `nixl`, but for "
            "*whole*, where prefill computes answers anew. A run of conversations was cut off in round three.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) OPTIONS='--reps 3 --requests 20' "
            "benchmarks/engines_gpu/go.sh serving:64; "
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) OPTIONS='--turns 4 --reps 3 --requests 6 "
            "--pairs ours,whole,nixl,mooncake' benchmarks/engines_gpu/go.sh serving:64; "
            "python -m benchmarks.engines_gpu.serving --out results --merge results/serving*.json",
        ),
        "h200_sglang_shared.json": Entry(
            "SGLang's ranks on one H200",
            tables.of_run,
            "TP 4->1, which NCCL refuses on one GPU: sums go through memory that the ranks share. The tokens are those "
            "of `nixl` with SGLang's staging buffer. Ranks take turns on the GPU, so times say nothing of transfers.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) LIMIT_S=88 OPTIONS='--share --pairs "
            'ours,nixl-staging,alone --lengths 512,4096 --reps 5 --rounds 0 --args {"disable_cuda_graph":true}\' '
            "benchmarks/engines_gpu/go.sh 4to1:16",
        ),
        "h200_sglang.json": Entry(
            "SGLang on two H200s",
            sglang_tables.shown,
            "All backends live at once, and take turns. *Alone* is a prefill server that transfers nothing. A gap is "
            "the time to decode's first token less its median. Between tokens: decode's, of all requests of a load.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) benchmarks/engines_gpu/go.sh 1to1:64; "
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) LIMIT_S=190 "
            "OPTIONS='--pairs ours,nixl-staging,mooncake-staging,alone --reps 8' "
            "benchmarks/engines_gpu/go.sh 2to1:16 1to2:16; "
            "python -m benchmarks.engines_gpu merge results/sglang_*.json; "
            "python -m benchmarks.engines_gpu plot --topology 2to1 benchmarks/results/h200_sglang.json "
            "docs/images/bench-sglang.svg",
            ("bench-sglang.svg", "Median times to the first token of each backend, for each prompt length"),
        ),
        "h200_sglang_programs.json": Entry(
            "Programs of a copy beside SGLang's models",
            tables.of_run,
            "*Ours* copies with a program for each multiprocessor, *other* with one for two, as the default is now.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) OPTIONS='--other OTHER/src "
            "--pairs ours,other,alone --reps 4 --rounds 4' benchmarks/engines_gpu/go.sh 1to1:64",
        ),
        "h200_sglang_first.json": Entry(
            "SGLang's first requests on two H200s",
            sglang_tables.firsts,
            "Time to decode's first token of the first request of each length, with all that is done once: kernels are "
            "compiled, and peers connect. `-staging` is `SGLANG_DISAGG_STAGING_BUFFER`. The runs at TP 2->1 and 1->2 "
            "reached their time limit in the warm-up, since backends without it took up to 20 s and more a request.",
            "OUT=results ENGINE=sglang COMMIT=$(git rev-parse HEAD) benchmarks/engines_gpu/go.sh 2to1:1 1to2:16 "
            "1to1:64 2to1:64; "
            "python -m benchmarks.engines_gpu firsts results/sglang_*.json",
        ),
        "sglang_cpu.json": Entry(
            "SGLang on two cores",
            sglang,
            "From the client's request until decode's first token, prefill included. The servers of the other backend "
            "are stopped, since SGLang's schedulers never sleep.",
            "python -m benchmarks.sglang_latency",
        ),
    },
    "Transfers between GPUs": {
        "h200_flags.json": Entry(
            "Whole transfers with flags",
            mapped_tables.gpu_flags,
            "From the end of the compute until the `poll` of decode's engine that releases the pages. *Busy*: between "
            "two polls, the engines run Python code.",
        ),
        "h200_instead.json": Entry(
            "Beside NIXL and NCCL",
            mapped_tables.gpu_instead,
            "The same pages by other means, without a notice to decode. NIXL reads a descriptor for each page and "
            "layer; NCCL moves contiguous bytes between `index_select` and `index_copy_`.",
        ),
        "h100_four.json": Entry(
            "A GPU for each rank",
            mapped_tables.gpu_paths_by_size,
            "Sizes are of the whole request. Copies of all pairs of ranks run at the same time; at TP 2->1 and 1->2 "
            "they share the links of one GPU. Flags had an earlier form.",
        ),
        "h100_paths.json": Entry(
            "Paths by size",
            mapped_tables.gpu_paths_by_size,
            "Decode's thread polls every 20 us. Ranks share a GPU where there are more than one on a side. Flags had "
            "an earlier form; `mapped_pull` was removed, as it was slower than `mapped`.",
        ),
        "h100_auto.json": Entry(
            "Unsegmented rooms",
            mapped_tables.gpu_paths_by_size,
            "`auto` is as fast as `mapped` by name. *Busy* engines compute in Python without a pause, and each wake-up "
            "of an endpoint's thread waits for the interpreter.",
        ),
        "h100_mapped.json": Entry(
            "On one GPU",
            mapped_tables.gpu_paths_by_size,
            "Both sides share a GPU and take turns on it, so the fixed costs of frames and threads weigh more than "
            "between GPUs.",
        ),
        "h200_transfer.json": Entry(
            "Staged over each transport, four GPUs",
            gpu_tables.gpu_transfer,
            "*Share* compares peer copies with the time until rows are in their pages, *until all know* until each "
            "rank knows it. In the *wire phase*, gather and scatter copy nothing. *Host* is time per gather.",
        ),
        "h200_transfer_two.json": Entry(
            "Staged over each transport, two GPUs",
            gpu_tables.gpu_transfer,
            "The ranks of a side share a GPU. At this later commit NIXL describes a write during its gather, and "
            "Mooncake has two writes per peer in flight.",
        ),
        "h200_staging.json": Entry(
            "Staging memory",
            mapped_tables.gpu_staging,
            "`released` as a share of a plain copy, or of an emulated wire. Few large segments cost least of the "
            "hosts' time.",
        ),
        "h200_contact.json": Entry(
            "First contact",
            mapped_tables.gpu_contact,
            "Constructors and first requests of endpoints that find nothing compiled.",
            "python -m benchmarks.gpu_contact",
        ),
        "h100_mapped_proof.json": Entry(
            "Models and killed processes",
            mapped_tables.gpu_proof,
            "A model decodes what `mapped` brought, and processes are killed while they write.",
            "disagg-kv demo --device cuda --strategy STRATEGY --prefill-tp P --decode-tp D --json",
        ),
    },
    "Kernels": {
        "h200_kernels.json": Entry(
            "Gather and scatter on an H200",
            gpu_tables.gpu_kernels,
            "48 layers, 8 KV heads of 128. GB/s counts reads and writes. *Host* is the time of the call; *new size* is "
            "a call with another token count.",
        ),
        "h100_kernels.json": Entry(
            "Gather and scatter on an H100",
            gpu_tables.gpu_kernels,
            "With gathers and copies that [convert](convert.md) bfloat16 into float8; their bytes are those read and "
            "those written.",
        ),
        "h100_convert.json": Entry(
            "Conversion through a wire",
            gpu_tables.converted,
            "Whole `staged` transfers between processes of one GPU, through an emulated wire, which half "
            "the bytes cross.",
        ),
        "h200_peer.json": Entry(
            "Beside SGLang's kernels",
            gpu_tables.gpu_peer,
            "From the call until the result is ready. Endpoints prepare a kernel before its bytes arrive.",
        ),
        "h100_launch.json": Entry(
            "Launches beside another thread",
            mapped_tables.gpu_launch,
            "A copy of 64 planes of 1,024 rows. The other thread wakes every 50 us, or computes in Python.",
        ),
        "h200_host.json": Entry(
            "Host time after a sleep",
            gpu_tables.gpu_host,
            "Each call back to back, and after 10 ms of sleep.",
        ),
        "cpu_kernels.json": Entry(
            "Gather and scatter on a CPU",
            cpu_tables.kernels,
            "One thread, CPU time, beside a `copy_` of the same size.",
        ),
    },
    "Transfers on CPUs": {
        "cpu_transfer_shm.json": Entry(
            "shm",
            cpu_tables.transfer,
            "Phases overlap; each is that of the slowest rank, with its waits for a core. *Without copies* is a run in "
            "which gather and scatter copy nothing.",
            TRANSFER.format("shm", "slice,staged"),
        ),
        "cpu_transfer_shm_mapped.json": Entry(
            "shm with a core for each process",
            cpu_tables.transfer,
            "The same with `mapped`, on a larger host.",
            TRANSFER.format("shm", "slice,staged,mapped"),
        ),
        "cpu_transfer_nixl.json": Entry(
            "NIXL", cpu_tables.transfer, "The same over NIXL.", TRANSFER.format("nixl", "slice,staged")
        ),
        "cpu_transfer_nixl_1to1.json": Entry(
            "NIXL, one rank a side",
            cpu_tables.transfer,
            "The same bytes with one rank per core.",
            TRANSFER.format("nixl", "slice,staged --prefill-tp 1"),
        ),
        "cpu_transfer_mooncake.json": Entry(
            "Mooncake", cpu_tables.transfer, "The same over Mooncake.", TRANSFER.format("mooncake", "slice,staged")
        ),
        "cpu_verify.json": Entry(
            "Verification",
            cpu_tables.verify,
            "[Checksums](protocol.md#what-is-compared) on the cores that also copy.",
            TRANSFER.format("shm", "staged --verify full --prefill-tp 2 --layers 16 --repeats 12"),
        ),
        "cpu_chunks.json": Entry(
            "Very many chunks",
            cpu_tables.chunks,
            "Rows are tiny, so the time is the endpoints' cost per chunk; it does not grow with the number of chunks.",
            "python -m bench chunks --json",
        ),
        "cpu_grant.json": Entry(
            "A grant, cores awake",
            cpu_tables.grant,
            "From a request for ring space until its grant, over ZeroMQ, beside bare ZeroMQ frames of the same sizes. "
            "A `chrt -i 0` loop keeps each core awake.",
            "python -m bench grant --json",
        ),
        "cpu_grant_quiet.json": Entry(
            "A grant, cores asleep",
            cpu_tables.grant,
            "The same host without these loops.",
            "python -m bench grant --json",
        ),
        "h200_grant.json": Entry(
            "A grant, GPU host",
            cpu_tables.grant,
            "Over a `UnixChannel`, on an idle host.",
            "python -m bench grant --json",
        ),
        "h200_lanes.json": Entry(
            "What each transport carries between GPUs",
            cpu_tables.gpu_lanes,
            "256 MiB from one GPU to another, by `disagg-kv doctor --between`.",
            "python -m benchmarks.lanes --device cuda:0 --json benchmarks/results/h200_lanes.json",
        ),
        "cpu_lanes.json": Entry(
            "What each transport carries",
            cpu_tables.lanes,
            "256 MiB between two processes, by `disagg-kv doctor --between`.",
            "python -m benchmarks.lanes --json benchmarks/results/cpu_lanes.json",
        ),
        "cpu_adapter_nixl.json": Entry(
            "What the transport adds to NIXL",
            cpu_tables.adapter,
            "A write from `submit` until `poll` reports its end, beside the library's blocking call. Most of the "
            "difference is the caller's sleep of 20 us.",
            "python -m bench adapter --transport nixl --json",
        ),
        "cpu_adapter_mooncake.json": Entry(
            "What the transport adds to Mooncake",
            cpu_tables.adapter,
            "The same for Mooncake.",
            "python -m bench adapter --transport mooncake --json",
        ),
    },
    "Layer groups": {
        "cpu_pipeline.json": Entry(
            "Emulated compute and wire",
            cpu_tables.pipeline,
            "C is compute, and T the wire. The bound is the minimum over N groups of max(C, T) + min(C, T) / N + N "
            "times the cost of a group, measured without overlap. *Hidden* is the share of what N groups can hide.",
            "python -m bench pipeline --compute 0.1 --plot docs/images/bench-pipeline.svg --json",
            ("bench-pipeline.svg", "Time to first token against prompt tokens"),
        ),
        "h200_pipeline.json": Entry(
            "A real model",
            gpu_tables.gpu_pipeline,
            "Until decode has rows and first token; decode runs no model. *Quiet* compares lower quartiles, as the "
            "model's time varies by up to half on these virtual machines.",
        ),
        "h200_pipeline_quiet.json": Entry(
            "A real model on a calm host",
            gpu_tables.gpu_pipeline,
            "An earlier commit, which called a hook for each layer.",
        ),
        "h200_pipeline_mapped.json": Entry(
            "A real model with mapped",
            gpu_tables.gpu_pipeline,
            "`mapped` beside `staged`, each at once and in layer groups. The engine's own thread launches the copies "
            "of `mapped`.",
        ),
    },
    "Endpoints": {
        "pairs.json": Entry(
            "Versions of the library in turns",
            cpu_tables.pairs,
            "Both ranks share one GPU. The knobs by which rows differ are those of the next section.",
        ),
        "idle.json": Entry(
            "Knobs of waiting",
            cpu_tables.idle,
            "Ratios over the policy with all knobs, least to most of all cases, and in how many the 95 % interval is "
            "away from 1. Quick polls, hurry, short naps and keep-alive frames were removed.",
            "python -m benchmarks.idle --cases ...",
        ),
        "cpu_scale.json": Entry(
            "Idle peers",
            fleet_tables.scale,
            "Real endpoints in many processes, connected over `shm`; few and many peers in turns. A peer over ZeroMQ "
            "takes more memory than the limit: [Sizing](sizing.md#links).",
            "python -m benchmarks.scale",
        ),
        "cpu_links.json": Entry(
            "Connected peers of a channel or transport",
            fleet_tables.links,
            "What a peer costs by itself, and what is left once links were dropped and made again.",
            "python -m benchmarks.links",
        ),
        "cpu_planning.json": Entry(
            "Planning",
            cpu_tables.planning,
            "CPU time of one writer and one target of 131,072 tokens and 64 layers, TP 8 to TP 4, `staged`; then of "
            "electing the writers among ranks that hold the same latent.",
        ),
        "cpu_page_tables.json": Entry(
            "Page tables on the wire",
            cpu_tables.page_tables,
            "By how many pages follow one another. *Encode* and *decode* include the frame; *check* looks for pages "
            "that come twice.",
            "python -m benchmarks.page_tables",
        ),
        "cpu_observer.json": Entry(
            "Observers",
            cpu_tables.observer,
            "Processor time of an event; then rooms of 1,024 tokens in one process, with observers and without.",
            "python -m benchmarks.observer",
        ),
    },
    "Prefixes": {
        "cpu_prefix_index.json": Entry(
            "The prefix index",
            cpu_tables.prefix_index,
            "CPU time of a prompt of 131,072 tokens at pages of 64, and memory for 65,536 pages without token ids.",
        ),
        "cpu_prefix_workload.json": Entry(
            "A workload of shared prefixes",
            cpu_tables.prefix_workload,
            "The shape of [SGLang's](https://github.com/sgl-project/sglang/pull/22234) benchmark. Compute, wire and "
            "scatters are emulated, and fitted to its figures: compare ratios. "
            "*Ideal* has no page rounding, evictions, control frames, scatters or host time.",
            "python -m bench prefix --json",
            ("bench-prefix.svg", "With held prefixes and without"),
        ),
    },
    "Failures": {
        "cpu_recovery.json": Entry(
            "A killed prefill process",
            fleet_tables.recovery,
            "Prefill is killed when it has sent half of a request. *Failed* is when decode's engine knows it, "
            "*released* when it may free the pages.",
            "python -m benchmarks.recovery",
        ),
        "cpu_fleet.json": Entry(
            "A large fleet",
            fleet_tables.fleets,
            "Real endpoints on a simulated clock, network and store; processor time is real.",
            "python -m sim --fleet 1000x1000 --json",
        ),
        "cpu_fleet_minute.json": Entry(
            "A fleet",
            fleet_tables.fleets,
            "A minute of traffic.",
            "python -m sim --fleet 200x200 --json",
        ),
        "cpu_fleet_faults.json": Entry(
            "A fleet with faults",
            fleet_tables.fleets,
            "A rack fails, ranks restart, and the store is away; then ranks ask the store more often.",
            "python -m sim --fleet 200x200 --faults all --json",
        ),
        "simulation.json": Entry(
            "Simulated worlds",
            cpu_tables.worlds,
            "Separate ranges of seeds, added up. Two of five ran again at a later commit: a bound of the simulator was "
            "too short for rooms that wait for a slow mapping.",
            "python -m sim --seeds N --seed-from M --json",
        ),
        "mutants.json": Entry(
            "Planted bugs",
            cpu_tables.mutants,
            "Each bug is planted alone, and worlds are simulated until a [rule](promises.md) is broken. The file has "
            "the bugs by name.",
            "nox -s mutants -- --json benchmarks/results/mutants.json",
        ),
    },
}
