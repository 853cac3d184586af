//! Our own programs for the guest, compiled in the builder system.

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::write;

/// Names and sources of the programs.
const PROGRAMS: [(&str, &str); 4] = [
    ("integrity", include_str!("../../guest/integrity.c")),
    ("errors", include_str!("../../guest/errors.c")),
    ("multicast", include_str!("../../guest/multicast.c")),
    ("threads", include_str!("../../guest/threads.c")),
];

/// What they share.
const CONTROL: &str = include_str!("../../guest/control.h");

/// What the programs depend on besides the steps before.
pub(crate) const KEY: &str = concat!(
    include_str!("../../guest/control.h"),
    include_str!("../../guest/integrity.c"),
    include_str!("../../guest/errors.c"),
    include_str!("../../guest/multicast.c"),
    include_str!("../../guest/threads.c")
);

/// Compiles them and puts them into the guest's system.
pub(crate) fn build(image: &GuestImage, log: &StepLog) -> Result<()> {
    let (builder, guest) = (image.builder_root(), image.guest_root());
    write(&builder.join("bed/control.h"), CONTROL)?;
    for (name, source) in PROGRAMS {
        write(&builder.join(format!("bed/{name}.c")), source)?;
        log.shell_in(&builder, &format!("gcc -O2 -Wall -Wextra -Werror -o /bed/{name} /bed/{name}.c -libverbs"))?;
        std::fs::copy(builder.join("bed").join(name), guest.join("usr/local/bin").join(name))
            .with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(())
}
