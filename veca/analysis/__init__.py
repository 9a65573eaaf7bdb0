"""Looking inside a model: contribution maps, similarity, projections, the paper's figures, numbers about the cores."""
