# Spillway. `make run` tries it, `make test` is what CI runs; see CONTRIBUTING.md for the rest.
# Needs Go 1.26, gcc, git and make; setup installs what else is missing.

.PHONY: run build test check lint bench bench-proxy setup setup-test clean

run: build ## build, then simulated workers and the front end in one process, on port 8000
	bin/spillway demo

build: setup ## bin/spillway
	go build -o bin/spillway ./cmd/spillway

test: setup-test check ## gofmt, vet, lint, and every test under the race detector
	REQUIRE_PROMETHEUS=1 REQUIRE_REDIS=1 go test -race -timeout 15m ./...
	SPILLWAY_TEST_ROUTER_MODE=kv go test -race ./proxy
	go test -race -run '^TestAtomicity$$' ./cmd/spillway -rounds 1000
	go test -run '^$$' -bench . -benchtime 1x ./busy ./logline ./proxy ./tracker ./upstream ./wire >/dev/null

check:
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt would change:" $$unformatted; exit 1; fi
	go vet ./...
	go tool staticcheck ./...

lint: check

bench: setup ## every benchmark once, with allocations
	go test -run '^$$' -bench . -benchmem ./...

bench-proxy: setup ## CPU time of a request through spillway, beside a bare httputil.ReverseProxy
	go test -v -count=1 -run '^TestBenchProxy$$' ./cmd/spillway -bench-proxy

# setup installs libzmq and pkg-config, which receiving events needs. It does nothing where both
# are there.
setup:
	@sh .ci/setup

# setup-test also puts Prometheus, which the tests of deploy/ run, and redis-server, which those of
# dispatch run, into bin/tools. Without them `go test` skips those tests; REQUIRE_PROMETHEUS and
# REQUIRE_REDIS make them fail instead.
setup-test:
	@sh .ci/setup test

clean:
	rm -rf bin
