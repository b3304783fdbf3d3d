# What CI runs, and the pieces of it.
.PHONY: check fast format lock proto

check:  ## everything CI runs
	.ci/run

fast:   ## something of everything, in a few minutes
	.ci/run fast

format: ## put the code in shape
	.ci/dev-env
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock:   ## pin what pyproject.toml asks for
	.ci/dev-env
	.venv/bin/python -m uv pip compile --quiet pyproject.toml --extra server --extra otel --group dev --universal --generate-hashes --no-header --upgrade -o requirements.lock

proto:  ## what src/quire/server/grpc/proto/quire.proto says, in Python
	.ci/dev-env
	cd src && ../.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. quire/server/grpc/proto/quire.proto
