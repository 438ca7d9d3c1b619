"""Task files, presets and the tiny policy, installed as `rlbench.data`."""
