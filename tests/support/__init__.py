"""What the tests run on: scripted models, real engines in child processes, Model Runner V2 without a GPU."""
