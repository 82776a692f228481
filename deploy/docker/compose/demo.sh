#!/bin/sh
# `make compose-demo`: compose.yaml from nothing to a report: images, certificates; a server, an evaluator and five
# sites in containers train on the digits. What it starts goes on afterwards; it says how to end it.
set -eu
cd "$(dirname "$0")/../.."
run="demo-$(date -u +%Y%m%d-%H%M%S)"
report="../runs/compose/$run.html"

say() { printf '\n== %s\n' "$*"; }

if docker compose version >/dev/null 2>&1; then
    compose="docker compose"
elif command -v docker-compose >/dev/null; then
    compose="docker-compose"
else
    echo "compose-demo needs Docker with Compose: the plugin 'docker compose', or docker-compose 1.29" >&2
    exit 1
fi
if ! docker info >/dev/null 2>&1; then
    echo "compose-demo: no Docker engine answers; start it, or run this as somebody who may use it" >&2
    exit 1
fi

if [ ! -e .env ]; then
    (umask 077 && sed "s|^GRAFANA_PASSWORD=\$|GRAFANA_PASSWORD=$(head -c 18 /dev/urandom | base64 | tr '+/' '-_')|" \
        .env.example >.env)
    say "deploy/.env is made, with a random password for Grafana"
fi
sh docker/compose/volumes.sh
# What .env says, and the environment before it, as compose does.
setting() { printenv "$1" || sed -n "s/^$1=//p" .env | tail -1; }

case ",$(setting COMPOSE_PROFILES)," in
*,gpu,*) suffix=-gpu ;;
*) suffix= ;;
esac
sites="site-1$suffix site-2$suffix site-3$suffix site-4$suffix site-5$suffix evaluator"
# build SERVICE IMAGE: unless there is one
build() {
    if ! docker image inspect "$2" >/dev/null 2>&1; then
        say "building $2; the client's takes minutes"
        $compose build "$1"
    fi
}
server_image="$(setting SERVER_IMAGE)" client_image="$(setting CLIENT_IMAGE)"
build server "${server_image:-protofed-server:0.4.0.dev0}"
build "site-1$suffix" "${client_image:-protofed-client:0.4.0.dev0}"

say "starting server, evaluator and five sites"
[ -n "$(setting SITES_POLICY)" ] ||
    echo "Their policy is standard.toml: class prototypes and own scores leave only in sums of all five."
# shellcheck disable=SC2086
$compose up -d --no-build $sites

say "starting Prometheus and Grafana"
watching=yes
$compose up -d --no-build prometheus grafana || watching=no

# All sites are one person's here. Between hospitals, each would hear the code in a telephone conference.
partners() { $compose run --rm -T operator consortium "$@"; }
if partners show | grep -q '^confirmed: site' && ! partners show | grep -q '^waiting:'; then
    say "the sites have confirmed their list of partners before"
else
    say "the sites confirm the list of partners by one code"
    tries=0
    until offered="$(partners offer --coordinator "this machine" --yes)"; do
        tries=$((tries + 1))
        [ "$tries" -lt 60 ] || { echo "compose-demo: not all sites have started; see '$compose logs'" >&2; exit 1; }
        sleep 2
    done
    code="$(printf '%s\n' "$offered" | sed -n 's/^code *//p' | tail -1)"
    echo "code $code"
    for site in site-1 site-2 site-3 site-4 site-5; do
        confirming="protofed client consortium --confirm $code --state /var/lib/protofed --yes"
        tries=0
        # The daemon may not have been given the list yet.
        # shellcheck disable=SC2086
        until $compose exec -T "$site$suffix" $confirming; do
            tries=$((tries + 1))
            [ "$tries" -lt 30 ] || { echo "compose-demo: $site did not confirm the list" >&2; exit 1; }
            sleep 2
        done
    done
fi

say "training: $run (Ctrl-C leaves it going on)"
tty=
if [ ! -t 0 ] || [ ! -t 1 ]; then tty=-T; fi
$compose run --rm $tty operator runs start digits-trio --set federation.min_sites=5 --name "$run" --watch

say "scores"
$compose run --rm $tty operator runs show "$run"
mkdir -p "$(dirname "$report")"
$compose run --rm -T operator report "$run" --out report.html >/dev/null
$compose run --rm -T --entrypoint cat operator report.html >"$report"

say "done"
echo "report:   $(cd "$(dirname "$report")" && pwd)/$run.html"
if [ "$watching" = yes ]; then
    port="$(setting GRAFANA_PORT)"
    echo "Grafana:  http://127.0.0.1:${port:-3000}, user admin, password GRAFANA_PASSWORD of deploy/.env"
else
    echo "Grafana:  not started: an image of Prometheus or Grafana was not to be had (PROMETHEUS_IMAGE, GRAFANA_IMAGE)"
fi
echo "go on:    cd deploy && $compose run --rm operator runs start digits-trio --set federation.min_sites=5 --name again --watch"
echo "stop:     cd deploy && $compose --profile cpu --profile gpu --profile tools down        (models, keys and records stay in volumes)"
