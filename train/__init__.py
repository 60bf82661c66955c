"""Fitting draft heads on a frozen target's hidden states. Start at `loop.py`; run with `python -m specheads.train`."""
