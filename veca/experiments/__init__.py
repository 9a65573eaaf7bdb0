"""Experiments whose question and answer are a page of the docs: one command each, resumable from start to end."""
