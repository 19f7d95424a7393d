"""Small stateful apps with typed tools, generated tasks and verifiers, to train and to test on."""
