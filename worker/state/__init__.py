"""The Redis layer: keys, documents, and the verbs that change a task."""
