# hsx: make help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENVS := "$(PYTHON)" include/hsx_demo/environments.py

# Made where missing, else found at once: export AIRFLOW_PYTHON and HSX_HOST_PYTHON to use environments of your own.
use_airflow = AF="$${AIRFLOW_PYTHON:-$$($(ENVS) airflow)}"; test -n "$$AF"
use_host = export HSX_HOST_PYTHON="$${HSX_HOST_PYTHON:-$$($(ENVS) host)}"; test -n "$$HSX_HOST_PYTHON"
rooms = export PYTHONPATH="$(CURDIR)/plugins:$(CURDIR)/include"

use_ui = AF="$${UI_PYTHON:-$$($(ENVS) ui)}"; test -n "$$AF"

# What mypy reads: one call a package root, test folders by themselves (their conftests share a name).
checked = include plugins dags

.PHONY: test-trainers help demo demo-training circle up down envs test test-compose test-crash test-faults test-hosts test-matrix test-host test-airflow lint format bench clean clean-cache \
  test-ui screenshots vendor bench-page

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo:            ## the whole DAG on this machine, on real parts, from nothing to a summary
	@$(use_airflow); $(use_host); $(rooms); exec "$$AF" -m hsx_demo.demo demo

demo-training:   ## the demo, then the training DAG by the hand-off: a few steps with speculators, and the acceptance
	@$(use_airflow); $(use_host); $(rooms); exec "$$AF" -m hsx_demo.demo training

circle:          ## samples, extraction, training, serving with the drafter, controls: a random model on this CPU
	@$(use_host); $(rooms); T="$$("$$HSX_HOST_PYTHON" -m hsx_demo.trainer_env speculators-0.7)"; \
	  PYTHON="$$HSX_HOST_PYTHON" TRAINER_PYTHON="$$T" exec bench/circle.sh tiny

up:              ## the same without a run: Airflow's UI and the server stay up; prints address and login
	@$(use_airflow); $(use_host); $(rooms); exec "$$AF" -m hsx_demo.demo up

down:            ## end what `make up` left
	@$(use_airflow); $(rooms); exec "$$AF" -m hsx_demo.demo down

envs:            ## make the two environments and print their pythons
	@$(ENVS) airflow host

test:            ## unit, integration and system tests in both environments
	@"$(PYTHON)" include/hsx_demo/run_tests.py

test-faults:     ## the whole fault suite (about 40 minutes); its table goes into docs/reliability.md
	@"$(PYTHON)" include/hsx_demo/run_faults.py

test-ui:         ## Airflow's UI and the page in a real browser (Debian: apt-get install chromium); pictures in build/ui
	@$(use_ui); $(use_host); $(rooms); exec "$$AF" -m pytest tests/ui

screenshots:     ## the same, and its pictures become those of docs/images
	@$(use_ui); $(use_host); $(rooms); export HSX_SCREENSHOTS="$(CURDIR)/docs/images"; exec "$$AF" -m pytest tests/ui

vendor:          ## the page's JavaScript libraries anew, as plugins/hsx_page/package-lock.json names them (npm)
	@sh plugins/hsx_page/vendor.sh

test-hosts:      ## two hosts, nights, windows and backfills on real parts (half an hour)
	@$(use_airflow); $(use_host); $(rooms); exec "$$AF" -m pytest tests/integration/long_two_hosts.py tests/integration/long_hosts.py -v

test-crash:      ## 30 seeded kills each of client, scheduler, server and all, and full disks: an hour or two
	@HSX_CRASH_MOMENTS="$${HSX_CRASH_MOMENTS:-30}" "$(PYTHON)" include/hsx_demo/run_tests.py crash

test-matrix:     ## capture in SGLang 0.5.14, 0.5.17 and the newest, under every scheduler setting: half an hour or more
	@"$(PYTHON)" include/hsx_demo/run_tests.py matrix

test-trainers:   ## the trainers' own code on a data set that SGLang made; installs each of them once
	@$(use_host); $(rooms); exec "$$HSX_HOST_PYTHON" -m pytest tests/trainers

test-compose:    ## docker-compose.yaml for real, and the commands of docs/install.md; needs Docker
	@$(use_airflow); $(use_host); $(rooms); export HSX_COMPOSE="$${HSX_COMPOSE:-docker compose}"; exec "$$AF" -m pytest tests/compose

lint:            ## ruff and mypy
	@$(use_airflow); "$$AF" -m ruff check .; "$$AF" -m ruff format --check .; "$$AF" -m mypy $(checked)

format:          ## ruff format
	@$(use_airflow); "$$AF" -m ruff check --fix .; "$$AF" -m ruff format .

bench:           ## the data plane by itself, then extraction against the same server's plain prefill, on a CPU
	@$(use_airflow); $(use_host); $(rooms); "$$HSX_HOST_PYTHON" bench/host_plane.py; exec "$$AF" bench/cpu_prefill.py

bench-page:      ## the page with 10,000 samples in 500 shards: seconds until it stands
	@$(use_ui); $(rooms); exec "$$AF" bench/page_load.py

clean:           ## what was made in this checkout
	@$(MAKE) --no-print-directory down || true
	@rm -rf build .mypy_cache .ruff_cache

clean-cache:     ## environments, model and data sets of all checkouts
	@C="$${HSX_CACHE:-$$HOME/.cache/hsx}"; rm -rf "$$C"/envs "$$C"/models "$$C"/datasets "$$C"/trainer-*; rmdir "$$C" 2>/dev/null || true
