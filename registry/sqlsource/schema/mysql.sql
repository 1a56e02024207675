-- MySQL 5.7, MariaDB 10.2 or later. Limits, one row for each bucket.
-- name is the bucket's name; rate is permits per second; max_wait is how many seconds a call may wait
-- (NULL: 0.5); disabled is 1 if every call passes; shadow is 1 if nothing is refused, only counted; per_key is 1
-- if each key has a bucket of its own.
-- At most window_limit calls begin in any window (seconds), and concurrent are under way at once; NULL: any number.
-- A call waits concurrent_wait seconds for a place among these (NULL: not at all). Beside these a NULL rate is none.
-- penalty is which answers of an upstream with Retry-After hold the bucket back: none, 503, 429 or 429,503; NULL: 503, and 429 where it is
-- one key's own.
-- priority is normal, low or lowest; NULL: normal.
CREATE TABLE IF NOT EXISTS `t_ratelimite_conf` (
  `configId` INT(11) NOT NULL AUTO_INCREMENT,
  `channelType` VARCHAR(24) NULL,
  `interfaceNo` VARCHAR(24) NULL,
  `name` VARCHAR(512) NULL,
  `rate` DECIMAL(16,6) NULL,
  `max_wait` DECIMAL(16,6) NULL,
  `disabled` TINYINT(1) DEFAULT 0 NOT NULL,
  `window` DECIMAL(13,3) NULL,
  `window_limit` INT(11) NULL,
  `concurrent` INT(11) NULL,
  `concurrent_wait` DECIMAL(16,6) NULL,
  `shadow` TINYINT(1) DEFAULT 0 NOT NULL,
  `per_key` TINYINT(1) DEFAULT 0 NOT NULL,
  `penalty` VARCHAR(8) NULL,
  `priority` VARCHAR(8) NULL,
  `lastModifyTime` DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),
  PRIMARY KEY (`configId`)
);
