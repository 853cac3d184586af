//! Builds a guest image from Debian packages, boots virtual machines with the device, and runs commands in them.
//!
//! The program `pvrdma-lab` ([`lab`]) does this for tests of other projects' programs. `guest-tests` uses the parts
//! below it: the image, the machines and the daemon.

pub mod agent;
pub mod daemon;
pub mod endpoints;
pub mod image;
mod interrupt;
pub mod lab;
pub mod process;
mod rootfs;
pub mod vm;

use anyhow::Error;

/// Sets up logging to standard error. `RUST_LOG` overrides the default level, `warn`.
pub fn init_log() {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
}

/// Formats the whole chain of causes without a backtrace, because the texts name the failed step.
pub fn causes(error: &Error) -> String {
    let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
    causes.join("\nbecause: ")
}
