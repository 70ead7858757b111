"""`harness estimate --report`: one page that evaluates an estimate's formulas as its sliders move."""
