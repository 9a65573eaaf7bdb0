"""The HTTP service: `veca serve`. Requests → bodies → decode → engine (batches, elastic budgets) → answers."""
