//! Shared libraries that are loaded at run time.
#![expect(unsafe_code, reason = "loads a shared library and takes its word for the types of its functions")]

use libloading::os::unix::{Library as Dynamic, RTLD_LOCAL, RTLD_NOW};
use thiserror::Error;

/// Reason a library cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The library or one of its dependencies is not installed.
    #[error("cannot load {name} ({reason}); it is part of rdma-core ({packages})")]
    Missing {
        /// File name of the library.
        name: &'static str,
        /// Packages that contain the library.
        packages: &'static str,
        /// Message of the dynamic linker.
        reason: String,
    },
    /// The library is too old.
    #[error("{name} has no {function}: rdma-core 25 or newer is needed")]
    Old {
        /// File name of the library.
        name: &'static str,
        /// Function that does not exist.
        function: &'static str,
    },
}

/// Opens a library by the name that programs are linked with.
pub(super) fn open(name: &'static str, packages: &'static str) -> Result<Dynamic, LoadError> {
    // SAFETY: the initialisers of the libraries of rdma-core read their configuration and have no preconditions.
    unsafe { Dynamic::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| LoadError::Missing {
        name,
        packages,
        reason: error.to_string(),
    })
}

/// Returns a function of a library.
///
/// # Safety
/// `F` is the type of this function in the library's header.
pub(super) unsafe fn function<F: Copy>(
    library: &Dynamic,
    name: &'static str,
    function: &'static str,
) -> Result<F, LoadError> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(function) };
    found.map(|symbol| *symbol).map_err(|_| LoadError::Old { name, function })
}

/// Defines a type with the functions of a library.
macro_rules! library {
    (
        $(#[$doc:meta])* $type:ident = $file:literal, $packages:literal;
        $($name:ident: fn($($arg:ty),*) -> $ret:ty;)*
    ) => {
        $(#[$doc])*
        pub(crate) struct $type {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// The last field, so that the library is unloaded after all others are dropped. `None` in tests, which
            /// provide their own functions.
            pub(crate) _library: Option<libloading::os::unix::Library>,
        }

        impl $type {
            /// Loads the library and resolves all functions.
            #[expect(unsafe_code, reason = "takes the library's word for the types of its functions")]
            pub(crate) fn load() -> Result<std::sync::Arc<Self>, $crate::sys::load::LoadError> {
                let library = $crate::sys::load::open($file, $packages)?;
                $(
                    // SAFETY: the type is that of this name in the library's header, since version 1 of its ABI.
                    let $name = unsafe {
                        $crate::sys::load::function::<unsafe extern "C" fn($($arg),*) -> $ret>(
                            &library,
                            $file,
                            stringify!($name),
                        )
                    }?;
                )*
                Ok(std::sync::Arc::new(Self { $($name,)* _library: Some(library) }))
            }
        }

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($type)).finish_non_exhaustive()
            }
        }
    };
}

pub(super) use library;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_the_library_names_its_packages() {
        let said = open("libpvrdma-absent.so.1", "Debian: nothing; Fedora: nothing").unwrap_err().to_string();
        for part in ["libpvrdma-absent.so.1 (", "Debian: nothing", "Fedora: nothing"] {
            assert!(said.contains(part), "{said}");
        }
    }
}
