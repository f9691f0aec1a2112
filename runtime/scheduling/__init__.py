"""What engine threads need that answer requests of many callers: a fair queue, and batches across requests."""
