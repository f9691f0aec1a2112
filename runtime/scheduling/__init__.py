"""What engine threads need to answer requests of many callers: a fair queue, batches across requests."""
