# Sourced by CI: a private Docker engine for the tests that need one.
#
#   . .ci/docker.sh
#   start_docker     exports DOCKER_HOST; returns 1 and says why where there can be none (the tests then skip)
#   stop_docker      ends that engine, by the process id that start_docker recorded
#
# It uses an engine that answers already; else it starts its own, with data and socket in a temp folder.

start_docker() {
    if command -v docker >/dev/null && docker version >/dev/null 2>&1; then
        return 0
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "no docker engine: starting one needs root; the Docker tests are skipped"
        return 1
    fi
    if ! command -v dockerd >/dev/null || ! command -v busybox >/dev/null; then
        echo "installing docker"
        if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive timeout 300 \
               apt-get install -q -y --no-install-recommends docker.io iptables busybox-static; } >/dev/null 2>&1; then
            echo "no docker engine: docker.io cannot be installed; the Docker tests are skipped"
            return 1
        fi
    fi
    OPRD_DOCKER=$(mktemp -d)
    # the sandboxes have no network, so the engine needs no bridge and no firewall rules
    dockerd --data-root "$OPRD_DOCKER/data" --exec-root "$OPRD_DOCKER/exec" --pidfile "$OPRD_DOCKER/engine.pid" \
        --host "unix://$OPRD_DOCKER/socket" --bridge=none --iptables=false >"$OPRD_DOCKER/log" 2>&1 &
    OPRD_DOCKER_PID=$!
    export DOCKER_HOST="unix://$OPRD_DOCKER/socket"
    waited=0
    until python3 - "$OPRD_DOCKER/socket" <<'PING' 2>/dev/null
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(2)
s.connect(sys.argv[1])
s.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
sys.exit(b" 200 " not in s.recv(64))
PING
    do
        waited=$((waited + 1))
        if [ "$waited" -gt 60 ] || ! kill -0 "$OPRD_DOCKER_PID" 2>/dev/null; then
            echo "no docker engine: dockerd does not come up; the Docker tests are skipped. Its last words:"
            tail -n 5 "$OPRD_DOCKER/log"
            stop_docker
            return 1
        fi
        sleep 0.5
    done
}

stop_docker() {
    [ -n "${OPRD_DOCKER_PID:-}" ] || return 0
    kill "$OPRD_DOCKER_PID" 2>/dev/null || true
    wait "$OPRD_DOCKER_PID" 2>/dev/null || true
    rm -rf "$OPRD_DOCKER"
    unset OPRD_DOCKER_PID OPRD_DOCKER DOCKER_HOST
}
