//! Test programs for the guest, compiled in the builder system.

use std::path::Path;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::write;

/// A program's name and its source.
pub(super) type Program = (&'static str, &'static str);

/// Compares all data that queue pairs move.
pub(super) const INTEGRITY: Program = ("integrity", include_str!("../../guest/integrity.c"));

const PROGRAMS: [Program; 7] = [
    INTEGRITY,
    ("errors", include_str!("../../guest/errors.c")),
    ("multicast", include_str!("../../guest/multicast.c")),
    ("threads", include_str!("../../guest/threads.c")),
    ("hostile", include_str!("../../guest/hostile.c")),
    ("requests", include_str!("../../guest/requests.c")),
    ("xdp", include_str!("../../guest/xdp.c")),
];

/// Source code that the programs share.
pub(super) const CONTROL: &str = include_str!("../../guest/control.h");

/// Dependencies of the programs besides the steps before.
pub(crate) const KEY: &str = concat!(
    include_str!("../../guest/control.h"),
    include_str!("../../guest/integrity.c"),
    include_str!("../../guest/errors.c"),
    include_str!("../../guest/multicast.c"),
    include_str!("../../guest/threads.c"),
    include_str!("../../guest/hostile.c"),
    include_str!("../../guest/requests.c"),
    include_str!("../../guest/xdp.c")
);

/// Compiles them and puts them into the guest's system.
pub(crate) fn build(image: &GuestImage, log: &StepLog) -> Result<()> {
    PROGRAMS.iter().try_for_each(|program| compile(program, &image.builder_root(), &image.guest_root(), log))
}

/// Compiles a program in a root directory with a compiler, and installs it into another.
pub(super) fn compile((name, source): &Program, builder: &Path, guest: &Path, log: &StepLog) -> Result<()> {
    write(&builder.join("bed/control.h"), CONTROL)?;
    write(&builder.join(format!("bed/{name}.c")), source)?;
    log.shell_in(builder, &format!("gcc -O2 -Wall -Wextra -Werror -pthread -o /bed/{name} /bed/{name}.c -libverbs"))?;
    std::fs::copy(builder.join("bed").join(name), guest.join("usr/local/bin").join(name))
        .with_context(|| format!("cannot copy {name}"))?;
    Ok(())
}
