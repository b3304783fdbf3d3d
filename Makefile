# What CI runs, and the pieces of it.
.PHONY: check docs fast format lock nightly proto

check:  ## everything CI runs
	.ci/run

nightly: ## other sizes and combinations too
	.ci/run nightly

fast:   ## something of everything, in about five minutes
	.ci/run fast

docs:   ## the docs site, in .cache/site
	.ci/dev-env
	.ci/docs-env
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build

format: ## put the code in shape
	.ci/dev-env
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock:   ## pin what pyproject.toml asks for
	.ci/dev-env
	.venv/bin/python -m uv pip compile --quiet pyproject.toml --extra server --extra otel --extra parquet --group dev --universal --generate-hashes --no-header --upgrade -o requirements.lock
	.venv/bin/python -m uv pip compile --quiet pyproject.toml --extra server --extra otel --extra parquet --group test --python-version 3.12 --resolution lowest-direct --generate-hashes --no-header --upgrade -o requirements.floors.lock
	.venv/bin/python -m uv pip compile --quiet pyproject.toml tests/tunix/requirements.in --python-version 3.12 --generate-hashes --no-header --upgrade -o tests/tunix/requirements.txt
	.venv/bin/python -m uv pip compile --quiet pyproject.toml --extra ray tests/ray/requirements.in --python-version 3.12 --generate-hashes --no-header --upgrade -o tests/ray/requirements.txt
	.venv/bin/python -m uv pip compile --quiet docs/requirements.in --universal --python-version 3.12 --generate-hashes --no-header --upgrade -o docs/requirements.txt

proto:  ## what src/quire/server/grpc/proto/quire.proto says, in Python
	.ci/dev-env
	cd src && ../.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. quire/server/grpc/proto/quire.proto
