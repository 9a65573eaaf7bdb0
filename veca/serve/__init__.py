"""The HTTP service: `veca serve`. Requests → bodies → decode → engine (the model, elastic sizes) → answers."""
