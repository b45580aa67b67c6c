"""The benchmark's rooms: peer (llama.cpp built natively), files (models), core (one timed run of ours), serve (over HTTP),
python (the daemon's own cost per token), report (tables, JSON, SVG)."""
