"""The OpenAI-compatible HTTP edge; it speaks to the mesh through the public interface and beats."""
