# What CI runs, and the pieces of it.
.PHONY: check docs fast format lock nightly proto pull-request upgrade
COMPILE = .venv/bin/python -m uv pip compile --quiet --generate-hashes --no-header $(UPGRADE)

check:  ## everything CI runs
	.ci/run

nightly: ## other sizes and combinations too
	.ci/run nightly

fast:   ## something of everything, in about five minutes
	.ci/run fast

pull-request: ## fast, the native driver, every architecture and an engine of each kind
	.ci/run pull-request

docs:   ## the docs site, in .cache/site
	.ci/dev-env
	.ci/docs-env
	NO_MKDOCS_2_WARNING=1 .cache/docs/bin/mkdocs build

format: ## put the code in shape
	.ci/dev-env
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
	.venv/bin/uv tool run --quiet clang-format==22.1.8 -i native/*.cc native/*.h native/*.inc

lock:   ## pin what pyproject.toml asks for; pins that still fit stay
	.ci/dev-env
	$(COMPILE) pyproject.toml --extra server --extra otel --extra parquet --group dev --universal -o requirements.lock
	$(COMPILE) pyproject.toml --extra server --extra otel --extra parquet --group test --python-version 3.12 --resolution lowest-direct -o requirements.floors.lock
	$(COMPILE) pyproject.toml tests/tunix/requirements.in --python-version 3.12 -o tests/tunix/requirements.txt
	$(COMPILE) pyproject.toml --extra ray tests/ray/requirements.in --python-version 3.12 -o tests/ray/requirements.txt
	$(COMPILE) docs/requirements.in --universal --python-version 3.12 -o docs/requirements.txt

upgrade: ## pin the newest versions that pyproject.toml allows
	$(MAKE) lock UPGRADE=--upgrade

proto:  ## what src/quire/server/grpc/proto/quire.proto says, in Python
	.ci/dev-env
	cd src && ../.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. quire/server/grpc/proto/quire.proto
