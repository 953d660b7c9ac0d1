"""Executes plans, decides nothing: mirror, inputs, model, sampler, runner."""
