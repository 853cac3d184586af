//! Writes the simulated part of the page "How far it scales": `fabric-sim docs/scaling.md`.

use std::path::PathBuf;
use std::process::ExitCode;

use fabric_sim::{insert, table};

fn write(path: &PathBuf) -> Result<(), String> {
    let page = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    insert(&page, "").ok_or("the page has no place for the table")?;
    let table = table(|line| print!("{line}"));
    let page = insert(&page, &table).ok_or("the page has no place for the table")?;
    std::fs::write(path, page).map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: fabric-sim PAGE");
        return ExitCode::FAILURE;
    };
    match write(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
