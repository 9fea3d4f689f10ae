"""What both kinds of endpoint share; it knows neither."""
