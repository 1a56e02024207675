-- MySQL 5.7, MariaDB 10.2 or later. Limits, one row for each bucket.
-- interfaceUrl is the bucket's name; rateLimit is permits per second; cache is how many seconds a call may wait
-- (NULL: 0.5); status is 1 (limited) or 0 (off); shadow is 1 if nothing is refused, only counted; perKey is 1
-- if each key has a bucket of its own.
-- At most windowLimit calls begin in any window (seconds), and concurrent are under way at once; NULL: any number.
-- A call waits concurrentWait seconds for a place among these (NULL: not at all). Beside these a NULL rate is none.
-- penalty is which answers of an upstream with Retry-After hold the bucket back: none, 503, 429 or 429,503; NULL: 503, and 429 where it is
-- one key's own.
-- priority is normal, low or lowest; NULL: normal.
CREATE TABLE IF NOT EXISTS `t_ratelimite_conf` (
  `configId` INT(11) NOT NULL AUTO_INCREMENT,
  `channelType` VARCHAR(24) NULL,
  `interfaceNo` VARCHAR(24) NULL,
  `interfaceUrl` VARCHAR(512) NULL,
  `rateLimit` DECIMAL(16,6) NULL,
  `cache` DECIMAL(16,6) NULL,
  `status` TINYINT(1) DEFAULT 1 NOT NULL,
  `window` DECIMAL(13,3) NULL,
  `windowLimit` INT(11) NULL,
  `concurrent` INT(11) NULL,
  `concurrentWait` DECIMAL(16,6) NULL,
  `shadow` TINYINT(1) DEFAULT 0 NOT NULL,
  `perKey` TINYINT(1) DEFAULT 0 NOT NULL,
  `penalty` VARCHAR(8) NULL,
  `priority` VARCHAR(8) NULL,
  `lastModifyTime` DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6),
  PRIMARY KEY (`configId`)
);
