//! Results of the library's functions.

use std::ffi::c_int;
use std::io;

use pvrdma_verbs::LogLimit;

/// Guests decide how many objects they destroy.
static LOG: LogLimit = LogLimit::new();

/// Most functions return an errno, some return -1 and set `errno`.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An object that does not go away stays until the device is closed. Nobody can be told but the log.
pub(super) fn destroyed(what: &str, code: c_int) {
    if let Err(error) = check(code) {
        LOG.error(module_path!(), "host", format_args!("a {what} cannot be destroyed: {error}"));
    }
}
