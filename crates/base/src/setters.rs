//! Methods that set the fields of a configuration.

/// Implements a method for each of the listed fields of a configuration that returns the configuration with another
/// value of this field. A configuration that is `#[non_exhaustive]`, so that a field can be added without breaking
/// callers, is then still written as one expression.
///
/// ```
/// /// Configuration of a receiver.
/// #[derive(Default)]
/// #[non_exhaustive]
/// pub struct ReceiverConfig {
///     /// Number of threads.
///     pub threads: usize,
///     /// Frames are copied.
///     pub copy: bool,
/// }
///
/// pvrdma_base::setters!(ReceiverConfig {
///     with_threads => threads: usize,
///     with_copy => copy: bool,
/// });
///
/// let config = ReceiverConfig::default().with_threads(3);
/// assert_eq!((config.threads, config.copy), (3, false));
/// ```
///
/// The methods of a `const` configuration, which must be `Copy`, can be called in constants: `setters!(const Name {`.
#[macro_export]
macro_rules! setters {
    (const $config:ident { $($method:ident => $field:ident: $type:ty),* $(,)? }) => {
        impl $config { $($crate::setters!(@method [const] $method $field $type);)* }
    };
    ($config:ident { $($method:ident => $field:ident: $type:ty),* $(,)? }) => {
        impl $config { $($crate::setters!(@method [] $method $field $type);)* }
    };
    (@method [$($const:ident)?] $method:ident $field:ident $type:ty) => {
        #[doc = concat!("Returns the configuration with another value of `", stringify!($field), "`.")]
        #[must_use]
        pub $($const)? fn $method(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    };
}
