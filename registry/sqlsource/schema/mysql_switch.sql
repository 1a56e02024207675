-- MySQL 5.7, MariaDB 10.2 or later. Switches of limiting for a whole fleet; a missing row means on.
CREATE TABLE IF NOT EXISTS `t_ratelimite_switch` (
  `name` VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  `enabled` TINYINT(1) DEFAULT 1 NOT NULL,
  `changedAt` TIMESTAMP NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
  PRIMARY KEY (`name`)
);
