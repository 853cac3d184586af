//! Results of the library's functions.

use std::ffi::c_int;
use std::io;

use pvrdma_base::LogLimit;

/// Limited, because guests decide how many objects they destroy.
static LOG: LogLimit = LogLimit::new();

/// Converts a result: most functions return an errno, some return -1 and set `errno`.
pub(super) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Logs a failure to destroy an object. The object stays until the device is closed, and a `drop` cannot return an
/// error.
pub(super) fn destroyed(what: &str, code: c_int) {
    if let Err(error) = check(code) {
        LOG.error(module_path!(), "host", format_args!("a {what} cannot be destroyed: {error}"));
    }
}
