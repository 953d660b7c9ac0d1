"""Requests in, text out: validation, chat template, tokenizer, detokenizer, stops, streams."""
