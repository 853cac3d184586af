//! Guests with other systems than the image's, each with the driver that DKMS built for its kernel.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use super::{connection, integrity, kernel_log, pingpong};
use crate::image::{GuestImage, GuestSystem, SYSTEMS};
use crate::pair::{LinkKind, Pair, PairOptions};

/// A case for each system.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "builds a system; runs when asked for: --only guests/";
    let case = |system: &'static GuestSystem| {
        Case::alone(format!("guests/{}", system.name), move |image| plays(image, system)).slow(WHEN)
    };
    SYSTEMS.iter().map(case).collect()
}

/// Two guests of the system use RDMA with each other. Their versions are kept for the table.
fn plays(image: &GuestImage, system: &GuestSystem) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("debootstrap needs root"));
    }
    let own = system.build(image)?;
    let row = row_file(image, system);
    match fs::remove_file(&row) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error).context("an old row stays"),
        _ => {}
    }
    let pair = Pair::boot(&own, &PairOptions { rxe: false, ..PairOptions::default() })?;
    let result = exchange(&pair).with_context(|| pair.diagnosis())?;
    let facts = facts(&pair)?;
    fs::write(&row, format!("| {} | {facts} |\n", system.title)).context("cannot keep the row")?;
    Ok(result)
}

/// Runs all kinds of queue pairs, the connection manager, and every operation with each byte compared.
fn exchange(pair: &Pair) -> Result<String> {
    let link = pair.link(LinkKind::Pvrdma)?;
    let mut note = String::new();
    for server in [0, 1] {
        let ends = pair.endpoints(&link);
        for (program, options) in [("ibv_rc_pingpong", "-c"), ("ibv_ud_pingpong", ""), ("ibv_srq_pingpong", "")] {
            pingpong::pingpong(&ends, server, program, options)?;
        }
        connection::rping(&ends, server)?;
        note = integrity::compare(pair, &link, server, 64, 3)?;
    }
    for vm in pair.vms() {
        let warnings = kernel_log::take_warnings(vm)?;
        ensure!(warnings.is_empty(), "{}: kernel warnings:\n{}", vm.name(), warnings.join("\n"));
    }
    Ok(note)
}

/// Returns the versions of the kernel and rdma-core, and the source of the driver, as cells of a table.
fn facts(pair: &Pair) -> Result<String> {
    let ask = |command: &str| -> Result<String> {
        Ok(pair.a().exec(command, Duration::from_secs(30))?.text.trim().to_owned())
    };
    let driver = ask("modinfo -n vmw_pvrdma")?;
    ensure!(driver.contains("/updates/dkms/"), "the driver is {driver}");
    Ok(format!("{} | {}", ask("uname -r")?, ask("dpkg-query -W -f '${Version}' rdma-core")?))
}

fn row_file(image: &GuestImage, system: &GuestSystem) -> std::path::PathBuf {
    system.place(image).directory().join("row.md")
}

/// Prints the table, after it has built some systems.
pub(crate) fn run(image: &GuestImage, build: &[String]) -> Result<()> {
    for name in build {
        let system = SYSTEMS.iter().find(|system| system.name == name);
        system.with_context(|| format!("there is no system {name}"))?.build(image)?;
    }
    print!("{}", table(image));
    Ok(())
}

/// Returns the table of all systems that have passed on this machine, as Markdown.
fn table(image: &GuestImage) -> String {
    let rows = SYSTEMS.iter().filter_map(|system| fs::read_to_string(row_file(image, system)).ok());
    format!("{HEAD}{}", rows.collect::<String>())
}

const HEAD: &str = "| guest | kernel | rdma-core |\n| --- | --- | --- |\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_a_row_for_each_system() {
        let page = include_str!("../../../docs/guests.md");
        let (_, table) = page.split_once(HEAD).unwrap();
        let rows: Vec<_> = table.lines().take_while(|line| line.starts_with('|')).collect();
        let titles: Vec<_> = rows.iter().map(|row| row.split('|').nth(1).unwrap().trim()).collect();
        assert_eq!(titles, SYSTEMS.iter().map(|system| system.title).collect::<Vec<_>>());
    }
}
