//! Places at which a test makes this process fail.
//!
//! A test starts a process with `PVRDMAD_FAULT=PLACE:die` or `PLACE:hang`. Without the feature `testing` a place does
//! nothing.

/// Fails here if a test wants that.
pub(crate) fn reach(place: &str) {
    if !cfg!(feature = "testing") {
        return;
    }
    let Ok(wanted) = std::env::var("PVRDMAD_FAULT") else { return };
    match wanted.split_once(':') {
        Some((at, "die")) if at == place => std::process::exit(9),
        Some((at, "hang")) if at == place => loop {
            std::thread::park();
        },
        _ => {}
    }
}
