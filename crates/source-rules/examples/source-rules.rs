//! Prints what the sources of a repository break: `cargo run -p source-rules --example source-rules -- [FOLDER]`.

use std::path::Path;

use anyhow::Result;
use source_rules::circles::{self, Report};
use source_rules::config::REPOSITORY;
use source_rules::workspace::Workspace;

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| ".".to_owned());
    let mut workspace = Workspace::read(Path::new(&folder), REPOSITORY)?;
    for problem in circles::unresolved(&workspace) {
        println!("unresolved: {problem}");
    }
    for reexports_are_arrows in [false, true] {
        workspace.config.reexports_are_arrows = reexports_are_arrows;
        println!("# Circles, re-exports by files with items of their own count: {reexports_are_arrows}\n");
        let arrows = circles::arrows(&workspace);
        for circle in circles::circles(&workspace, &arrows) {
            println!("{}", Report { workspace: &workspace, arrows: &arrows, circle: &circle });
        }
    }
    Ok(())
}
