# Shell functions that .ci/run and .ci/extended share. Sourced, not run.

# A cargo subcommand from crates.io in this version, built once per machine. A newer one changes what is checked, so it
# comes with a commit of its own. Without optimisation it is built in half of the time, and its work takes seconds.
cargo_tool() { # NAME VERSION
    cargo install --list | grep -q "^$1 v$2:" || cargo install --quiet --locked --debug "$1@$2"
}

# Runs a cargo command for another target. Skipped where rustup cannot fetch that target's standard library.
other_target() { # COMMAND TARGET
    if rustup target add "$2"; then
        cargo "$1" --quiet -p pvrdmad --target "$2"
    else
        echo "skipped: rustup has no $2 here"
    fi
}

# Installs Debian packages unless PROGRAM, which one of them contains, is there already.
debian_packages() { # PROGRAM PACKAGE...
    command -v "$1" >/dev/null && return
    apt-get update -q && apt-get install -qy --no-install-recommends "${@:2}"
}

# The programs that pvrdmad/packaging/build calls.
packaging_tools() {
    cargo_tool cargo-deb 3.8.0
    cargo_tool cargo-auditable 0.7.7
    cargo_tool cargo-cyclonedx 0.5.9
    rustup target add x86_64-unknown-linux-musl
    debian_packages objcopy binutils
    debian_packages dpkg-shlibdeps dpkg-dev
}
