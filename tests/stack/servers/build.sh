#!/usr/bin/env bash
# Builds the servers of tests/stack (collector, Jaeger, Prometheus, promtool) from the Go modules beside this script,
# into a folder outside the clone, under a name that depends on all that determines its contents. Prints that folder as
# its last line and does nothing when the servers are there. Sources come from the Go module proxy, and so does a Go
# that is new enough where there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

go_wanted=1.26.8 # at least what the go.mod files ask for
cache="${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/otel-brick-ci"
key=$({ cat build.sh ./*/go.mod ./*/go.sum ./*/*.go; uname -sm; } | sha256sum | cut -c1-16)
servers="$cache/servers-$key"

mkdir -p "$servers"
exec 9>"$servers/.lock"
if command -v flock >/dev/null; then flock 9; fi # a second build waits for the first, and finds its results

complete() {
    [ -x "$servers/collector" ] && [ -x "$servers/jaeger" ] && [ -x "$servers/prometheus" ] && [ -x "$servers/promtool" ]
}

# go_minor: X of the "go" on the path, whose version is 1.X, or 0.
go_minor() {
    local version
    version=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null) || version=""
    version=${version#go1.}
    version=${version%%[!0-9]*}
    echo "${version:-0}"
}

# find_go: puts a new enough Go on the path. One from 1.21 on fetches the release that a go.mod asks for by itself; the
# release is a module like any other, so an older one, such as Debian's, can be made to fetch it too.
find_go() {
    if [ "$(go_minor)" = 0 ]; then
        PATH="/usr/local/go/bin:$PATH"
    fi
    if [ "$(go_minor)" = 0 ]; then
        echo "no Go on this machine: installing one with apt-get" >&2
        DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends golang-go ca-certificates >&2
    fi
    if [ "$(go_minor)" -ge 21 ]; then
        export GOTOOLCHAIN=auto
        return
    fi
    local release directory
    release="golang.org/toolchain@v0.0.1-go$go_wanted.$(go env GOOS)-$(go env GOARCH)"
    directory=$(cd / && GOFLAGS="" go mod download -json "$release" | sed -n 's/^.*"Dir": "\(.*\)".*$/\1/p')
    [ -n "$directory" ]
    # Old releases of Go unpack modules without the permission to run what is in them.
    chmod -R u+w "$directory"
    chmod -R a+x "$directory/bin" "$directory/pkg/tool"
    export PATH="$directory/bin:$PATH" GOTOOLCHAIN=local
    unset GOROOT
}

# build NAME MODULE PACKAGE [FLAGS...]
build() {
    local name=$1 module=$2 package=$3 started=$SECONDS
    shift 3
    if [ -x "$servers/$name" ]; then return; fi
    echo "building $name" >&2
    # Hundreds of lines about downloads would hide what went wrong.
    go build -C "$module" -mod=readonly -trimpath -buildvcs=false -ldflags "-s -w" "$@" \
        -o "$servers/.$name.partial" "$package" 2> >(grep -v '^go: downloading ' >&2)
    mv "$servers/.$name.partial" "$servers/$name"
    echo "built $name in $((SECONDS - started)) s" >&2
}

if ! complete; then
    find_go
    export CGO_ENABLED=0 GOWORK=off GOFLAGS=""
    build collector collector .
    build jaeger jaeger github.com/jaegertracing/jaeger/cmd/jaeger
    # Without the clients of clouds in which Prometheus could look for targets.
    build prometheus prometheus github.com/prometheus/prometheus/cmd/prometheus -tags "remove_all_sd netgo"
    build promtool prometheus github.com/prometheus/prometheus/cmd/promtool -tags "remove_all_sd netgo"
fi
touch "$servers"
find "$cache" -mindepth 1 -maxdepth 1 -name 'servers-*' ! -name "servers-$key" -mtime +7 -exec rm -rf {} +
echo "$servers"
