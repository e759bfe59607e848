"""`moebatch bench`: throughput of named workloads, rivals beside it, pictures of both."""
