"""Other engines on the same prompts. Each file is a program of its own, for another Python too.

    python FILE TASK.json

They import nothing of moebatch, so that an environment with the rival alone is enough. Each prints
one line of JSON, {"event": "done", "generated", "seconds", …}: seconds of prefill and decode, without
loading, after a warm-up that does not count.
"""
