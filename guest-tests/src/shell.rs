//! `shell`: an interactive pair of guests.

use std::io::BufRead;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cli::ShellOptions;
use crate::image::GuestImage;
use crate::pair::{LinkKind, Pair, PairOptions};

/// Boots a pair and runs commands from standard input until the input ends.
pub(crate) fn run(image: &GuestImage, options: &ShellOptions) -> Result<()> {
    let kind = options.link.kind();
    let options = PairOptions { pvrdma: kind == LinkKind::Pvrdma, ..PairOptions::default() };
    let pair = Pair::boot(image, &options)?;
    println!("two guests are up; link {:?}", pair.link(kind)?);
    println!("consoles, logs and sockets: {}", pair.directory().display());
    for vm in pair.vms() {
        println!("QEMU of {}: process {}", vm.name(), vm.process_id());
    }
    println!("type 'a COMMAND' or 'b COMMAND', with '&' at its end to leave it running; end of input ends the guests");
    let mut background = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.context("cannot read the input")?;
        let Some((name, command)) = line.trim().split_once(' ') else {
            continue;
        };
        let Some(vm) = pair.vms().iter().find(|vm| vm.name() == name) else {
            println!("there is no guest '{name}'");
            continue;
        };
        if let Some(command) = command.strip_suffix('&') {
            background.push(vm.spawn(command)?);
            continue;
        }
        match vm.exec(command, Duration::from_secs(600)) {
            Ok(output) => println!("{}[{}]", output.text, output.code),
            Err(error) => println!("{error:#}"),
        }
        background.retain(|job| {
            let running = job.is_running();
            if !running {
                println!("{}\n{}", job.title(), job.output());
            }
            running
        });
    }
    Ok(())
}
