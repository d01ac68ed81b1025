"""What runs the steps: one module per executor behind `base.Executor`."""
