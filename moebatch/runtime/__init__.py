"""How it runs: bytes, time and threads. Executes schedules; decides nothing about policy."""
