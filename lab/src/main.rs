//! Runs a command in guests that have RDMA: see `lab` in the library.

use std::process::ExitCode;

use clap::Parser;
use pvrdma_lab::lab::{self, LabCli};

fn main() -> ExitCode {
    pvrdma_lab::init_log();
    match LabCli::try_parse() {
        Ok(cli) => lab::run(&cli),
        Err(error) => lab::not_understood(&error),
    }
}
