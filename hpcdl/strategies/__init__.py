"""Strategies: one file each, whose `train` reads like its algorithm in the lecture or paper."""
