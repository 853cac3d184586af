//! Tests of the engine through its verbs, on virtual time unless they are about threads.

mod atomics;
mod capture;
mod congestion;
mod errors;
mod guard;
mod integrity;
mod life;
mod marks;
mod ops;
mod pass_through;
mod port;
mod retry;
mod srq;
mod threads;
mod ud;
mod wire;
