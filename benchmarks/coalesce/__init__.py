"""coalesce, measured: several forwards and backwards, one gradient reduction, one step."""
