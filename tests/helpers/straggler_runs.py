"""Runs with stragglers, as tests configure them."""

REAL = {
    "model": "tiny",
    "group": 4,
    "batch": 16,
    "steps": 5,
    "concurrency": 4,
    "max_tokens": 48,
    "preflight": 0,
    "eval": [],
    "filter": "none",
    "placement": "split",
    "decode_steps": 1,
}
