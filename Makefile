# What CI runs, and the pieces of it.
.PHONY: check fast format lock

check:  ## everything CI runs
	.ci/run

fast:   ## the two-minute subset
	.ci/run fast

format: ## put the code in shape
	.ci/dev-env
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock:   ## pin what pyproject.toml asks for
	.ci/dev-env
	.venv/bin/python -m uv pip compile --quiet pyproject.toml --extra server --extra otel --group dev --universal --generate-hashes --no-header --upgrade -o requirements.lock
