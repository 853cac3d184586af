//! The loaded library, with its functions.
#![expect(unsafe_code, reason = "loads a shared library and takes its word for the types of its functions")]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

use libloading::os::unix::{Library as Dynamic, RTLD_LOCAL, RTLD_NOW};
use thiserror::Error;

use super::{
    Ah, AhAttr, AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp, QpAttr, QpInitAttr,
    Srq, SrqAttr, SrqInitAttr,
};

/// Name of the library that programs are linked with.
const NAME: &str = "libibverbs.so.1";

/// Reason the library cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The library or one of its dependencies is not installed.
    #[error(
        "cannot load {NAME} ({0}); it is part of rdma-core (Debian: libibverbs1 and ibverbs-providers; Fedora: libibverbs)"
    )]
    Missing(String),
    /// The library is too old.
    #[error("{NAME} has no {0}: rdma-core 25 or newer is needed")]
    Old(&'static str),
}

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// Functions of the library, valid while this value lives.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// The last field, so that the library is unloaded after all others are dropped. `None` in tests, which
            /// provide their own functions.
            pub(crate) _library: Option<Dynamic>,
        }

        impl Library {
            /// Loads the library and resolves all functions.
            pub(crate) fn load() -> Result<Arc<Self>, LoadError> {
                // SAFETY: the initialisers of libibverbs read its configuration and have no preconditions.
                let library = unsafe { Dynamic::open(Some(NAME), RTLD_NOW | RTLD_LOCAL) }
                    .map_err(|error| LoadError::Missing(error.to_string()))?;
                $(
                    // SAFETY: the type is that of this name in the library's header, since version 1.1 of its ABI.
                    let $name = *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $ret>(stringify!($name))
                    }
                    .map_err(|_| LoadError::Old(stringify!($name)))?;
                )*
                Ok(Arc::new(Self { $($name,)* _library: Some(library) }))
            }
        }
    };
}

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list: fn(*mut *mut Device) -> ();
    ibv_get_device_name: fn(*mut Device) -> *const c_char;
    ibv_open_device: fn(*mut Device) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_get_async_event: fn(*mut Context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event: fn(*mut AsyncEvent) -> ();
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    ibv_reg_mr_iova: fn(*mut Pd, *mut c_void, usize, u64, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_resize_cq: fn(*mut Cq, c_int) -> c_int;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut Cq, u32) -> ();
    ibv_create_srq: fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    ibv_modify_srq: fn(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    ibv_destroy_srq: fn(*mut Srq) -> c_int;
    ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_query_qp: fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
    ibv_create_ah: fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    ibv_destroy_ah: fn(*mut Ah) -> c_int;
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_the_library_names_its_packages() {
        let said = LoadError::Missing("no such file".to_owned()).to_string();
        for part in ["libibverbs.so.1 (no such file)", "Debian: libibverbs1", "Fedora: libibverbs"] {
            assert!(said.contains(part), "{said}");
        }
    }
}
