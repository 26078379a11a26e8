# make demo   the main job on real VMs, with a table and out/report.html
# make test   everything that must hold (what CI runs)
# make help   the rest

.DEFAULT_GOAL := help
CARGO ?= cargo
ROUNDS ?= 17
PEER_ROUNDS ?= 9
PIPE_ROUNDS ?= 5
CHANNEL_ROUNDS ?= 7
MODULE_ROUNDS ?= 5
MIB ?= 64
NAME ?= peers
FUZZ_SECONDS ?= 60
FUZZ_SANITIZER ?= address
FSX_MINUTES ?= 20
# Tests of VMs that another QEMU than the lab's own must pass too: every device, its restart, channels, pipes, a move.
VM_CORE = net:: disk::fio restart:: vsock:: channels:: channel_hostile:: pipe:: idle_move::
DENY_VERSION = 0.20.2

SIM = consolidate scale shares nodes sleep

.PHONY: help prepare modules mariadb-plugin mariadb-suites build test lint tidy reference unit vm demo bench bench-sim bench-demo bench-peers bench-events bench-consolidate bench-shares bench-idle bench-pipes bench-channels bench-channels-programs bench-modules soak fuzz fuzz-short clean

help:
	@sed -n 's/^## //p' Makefile

## make demo              boot VMs on Millrace and on QEMU's own devices, compare, write out/report.html (ROUNDS=17)
##                        DEMO=--strict: exit code 3 where a row is behind
demo: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench -p millrace-lab
	./target/release/bench demo --rounds $(ROUNDS) --out out $(DEMO)

## make bench NAME=peers  network and disk back ends against DPDK, OVS, qemu-storage-daemon: out/bench-peers.html (PEER_ROUNDS=9)
bench: bench-$(NAME)

bench-demo: demo

bench-peers: prepare
	@./scripts/peers
	$(CARGO) build --release --locked -p millrace -p millrace-bench -p millrace-frontend
	./target/release/bench peers --rounds $(PEER_ROUNDS) --out out

## make bench NAME=events  exits, interrupts, wake-ups and system calls per request: out/bench-events.json
bench-events: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench events --out out

## make bench NAME=consolidate  eight VMs on one sidecore against QEMU's main loops and disk threads
bench-consolidate: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench consolidate --out out

## make bench NAME=shares many VMs on one sidecore: shares, newcomers, victims: out/bench-shares.html (PEER_ROUNDS=9)
bench-shares: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench -p millrace-frontend
	./target/release/bench shares --rounds $(PEER_ROUNDS) --out out

## make bench NAME=idle   what ports cost that do nothing, and what remains of those that go
bench-idle: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench -p millrace-frontend
	./target/release/bench idle --out out

## make bench NAME=pipes  files and web servers of a VM that shares its CPU: pipes, sendfile, read-write (PIPE_ROUNDS=5, MIB=64)
bench-pipes: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench pipes --rounds $(PIPE_ROUNDS) --mib $(MIB) --out out

## make bench NAME=channels  two guests by the channel, TAP and bridge, OVS, the switch, loopback; the hook's cost (CHANNEL_ROUNDS=7)
bench-channels: prepare
	@./scripts/peers
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench channels --rounds $(CHANNEL_ROUNDS) --out out

## make bench NAME=channels-programs  Redis, nginx, iperf3, PostgreSQL and NFS between two guests: out/bench-channels-programs.html
bench-channels-programs: prepare
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench channels --programs --secs 1.7 --rounds $(CHANNEL_ROUNDS) --out out

## make bench NAME=modules  MariaDB's inserts: table store in the host, in the guest on all disks, other engines (MODULE_ROUNDS=5)
bench-modules: modules
	@./scripts/mariadb-plugin
	$(CARGO) build --release --locked -p millrace -p millrace-bench
	./target/release/bench modules --rounds $(MODULE_ROUNDS) --out out

## make bench NAME=sim    placement, credits and sleep of up to 64 sidecores in virtual time: out/sim-*.svg
bench-sim: prepare
	$(CARGO) build --release --locked -p millrace-sim
	@for s in $(SIM); do echo "== $$s"; ./target/release/sim $$s --out out || exit 1; done

## make test              format, lints, unit, property, API and VM tests, with five seconds of each fuzz target
test: prepare
	@# Much of the plugin's build is for one core: beside all that is built before the first test needs it.
	@./scripts/mariadb-plugin test & plugin=$$!; result=0; \
	    { $(MAKE) lint modules && $(CARGO) test --locked --workspace --no-run; } || result=$$?; \
	    wait $$plugin || result=$$?; exit $$result
	@# All at once: parts of the workspace, one after the other, would build most of it several times.
	$(CARGO) test --locked --workspace
	cd wasm && CARGO_TARGET_DIR=../target/modules/native $(CARGO) test --locked

prepare:
	@./scripts/prepare

## make modules           the WebAssembly modules: target/modules/*.wasm
modules: prepare
	@./scripts/modules

## make mariadb-plugin    the storage engine MILLRACE for Debian's MariaDB: target/mariadb/ha_millrace.so
mariadb-plugin: prepare
	@./scripts/mariadb-plugin
	@./scripts/mariadb-plugin test

## make mariadb-suites    MariaDB's own suites for storage engines on MILLRACE, 15 minutes: out/mariadb-suites/
mariadb-suites: mariadb-plugin modules
	$(CARGO) build --locked -p millrace
	./scripts/mariadb-suites

## make lint              only format, lints, and rules for other people's crates (deny.toml)
lint: prepare
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	@# WebAssembly modules are a workspace of their own, too: another compiler makes them.
	cd wasm && $(CARGO) fmt --all --check && \
	    CARGO_TARGET_DIR=../target/modules/native $(CARGO) clippy --locked --all-targets -- -D warnings
	@# The guest without an operating system: the lab builds it, for a target of its own.
	cd test/lab/foreign && $(CARGO) fmt --all --check
	@# Fuzz targets have been looked at as test/fuzz/short and the module sql build them. As those of libFuzzer they are a
	@# workspace of their own, of which nothing is built here.
	cd test/fuzz && $(CARGO) tree --locked --depth 0 >/dev/null
	@# Other people's crates: licences, sources, versions.
	@$(CARGO) deny --version >/dev/null 2>&1 || \
	    $(CARGO) install --quiet --locked --debug cargo-deny --version $(DENY_VERSION)
	@for workspace in . wasm test/fuzz test/lab/foreign; do \
	    $(CARGO) deny --locked --manifest-path $$workspace/Cargo.toml --config $(CURDIR)/deny.toml \
	        check --hide-inclusion-graph -A unmatched-skip bans licenses sources || exit 1; done

## make tidy              report of the tree's rules: circles of imports, lengths, comments, links (a test of make test)
tidy: prepare
	$(CARGO) run --quiet --locked -p millrace-tidy

## make reference         docs/reference: pages of settings, metrics and errors, made from the code (a test finds old ones)
reference: prepare
	$(CARGO) run --quiet --locked -p millrace-tidy -- reference

## make unit              only the tests without VMs
unit: prepare
	$(CARGO) test --locked --workspace --exclude millrace-lab --exclude millrace --exclude millrace-channel \
	    --exclude millrace-modules
	$(CARGO) test --locked -p millrace-channel --lib
	cd wasm && CARGO_TARGET_DIR=../target/modules/native $(CARGO) test --locked

## make vm                only the tests on real VMs (QEMU=7.2 or QEMU=/PATH: a core list of them, on that QEMU)
ifdef QEMU
vm: prepare
	MILLRACE_QEMU=$(QEMU) $(CARGO) test --locked -p millrace-lab --test vm
	MILLRACE_QEMU=$(QEMU) $(CARGO) test --locked -p millrace --test vm -- $(VM_CORE)
else
vm: prepare modules mariadb-plugin
	@# One command: WebAssembly's compiler is built once for all of them.
	$(CARGO) test --locked -p millrace-lab -p millrace -p millrace-channel -p millrace-modules
endif

## make build             the daemon, optimised
build: prepare
	$(CARGO) build --release --locked -p millrace

## make soak              the VM tests with the full amounts of data (an hour or more), then random checked
##                        operations with a killed daemon: 24 cases of FSX_MINUTES=20, as many at a time as CPUs
soak: prepare
	MILLRACE_SOAK=1 $(CARGO) test --release --locked -p millrace -p millrace-lab -p millrace-qcow2
	MILLRACE_SOAK=1 $(CARGO) test --release --locked -p millrace -p millrace-lab --test vm --test tools -- \
	    --ignored channel quic
	MILLRACE_FSX_MINUTES=$(FSX_MINUTES) $(CARGO) test --release --locked -p millrace --test vm -- \
	    --ignored checked::long
	$(MAKE) vm QEMU=7.2

## make fuzz              every fuzz target with libFuzzer for FUZZ_SECONDS=60 each (g++; FUZZ_SANITIZER=address)
fuzz: prepare
	@command -v cargo-fuzz >/dev/null || $(CARGO) install --locked cargo-fuzz
	CARGO=$(CARGO) FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_SANITIZER=$(FUZZ_SANITIZER) ./scripts/fuzz

## make fuzz-short        every fuzz target for FUZZ_SECONDS=5 each on its seeds and on changes of them, without libFuzzer
fuzz-short: prepare
	CARGO=$(CARGO) ./scripts/fuzz-short

## make clean             remove what was built and made
clean:
	$(CARGO) clean
	rm -rf out
