"""Tuning before a run: what cannot change in mid-run is settled by short runs of its own, in processes of their own."""
