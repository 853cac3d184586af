//! The `[device.limits]` table.

use pvrdma_dev::Limits;
use serde::Deserialize;

macro_rules! limits {
    ($($field:ident: $kind:ty,)*) => {
        /// Upper limits of a device; what is not given keeps its default.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct LimitsSpec {
            $(pub $field: Option<$kind>,)*
        }

        impl LimitsSpec {
            pub(super) fn resolve(&self) -> Limits {
                let default = Limits::default();
                Limits { $($field: self.$field.unwrap_or(default.$field),)* }
            }
        }
    };
}

limits! {
    max_qp: u32,
    max_qp_wr: u32,
    max_sge: u32,
    max_cq: u32,
    max_cqe: u32,
    max_mr: u32,
    max_mr_size: u64,
    max_pd: u32,
    max_srq: u32,
    max_srq_wr: u32,
    max_uar: u32,
    max_ah: u32,
    gid_table: u32,
    max_extents: u64,
}
